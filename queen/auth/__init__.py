"""Who may do what, and for which tenant: tokens, roles and the tenant header. No database is asked."""
