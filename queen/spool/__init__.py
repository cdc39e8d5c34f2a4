"""The spool: pushes on the broker's own disk while PostgreSQL can't take them, and their way back."""
