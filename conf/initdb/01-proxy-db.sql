-- The proxy's own database, beside that of the messages.
CREATE DATABASE queen_proxy;
