"""PostgreSQL: connections, the schema, and one typed call per stored operation."""
