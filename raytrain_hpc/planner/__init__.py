"""Planning before a run: legal layouts, placement, memory and step time. Standard library and config only, no torch."""
