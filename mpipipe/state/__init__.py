"""What survives a run: its folder, its weights."""
