"""The main job end to end on a lab: what `make demo` runs. It only calls the commands that a user would call."""
