"""People: sign-in, sessions, the console's API and pages, and the dashboard behind the sign-in."""
