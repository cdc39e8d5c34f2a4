"""Lets ``python -m bench`` start the command line."""

from bench.cli import main

raise SystemExit(main())
