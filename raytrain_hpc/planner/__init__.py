"""Pure decisions: layout, placement, memory, cost. Standard library and config only."""
