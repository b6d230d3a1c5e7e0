"""What a run says of itself: metric keys and formulas, the console, the files."""
