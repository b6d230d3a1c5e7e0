"""Two simulated nodes of two CPUs each: prints the cluster's address, and ends when its input does."""

import sys

from ray.cluster_utils import Cluster

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=2, include_dashboard=False)
cluster.wait_for_nodes(timeout=60)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
