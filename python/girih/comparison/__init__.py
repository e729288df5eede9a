"""What `girih.compare` trains, and the table and the figure it makes of it."""
