"""Queen: a partitioned message queue over HTTP on PostgreSQL.

Only the version lives here, so that importing the package starts nothing and
the packaging tools can read the version without the dependencies.
"""

__version__ = "1.3.0"
