"""The tasks, cells, table and figure of `girih.compare`."""
