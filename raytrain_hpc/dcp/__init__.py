"""Import of torch.distributed.checkpoint (DCP) directories, such as torchtitan's, without running pickled code."""
