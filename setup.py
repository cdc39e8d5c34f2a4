"""Entry point for packaging tools; everything is declared in setup.cfg."""

from setuptools import setup

setup()
