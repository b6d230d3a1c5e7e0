"""What a rank holds of the training state, as plain data, and the random bits that belong to it."""
