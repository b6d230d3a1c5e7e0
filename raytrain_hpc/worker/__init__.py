"""One process a device: builds the model, runs the steps. No Ray but in actor.py."""
