"""Map-style datasets of the user: their order, their readers, and what identifies them."""
