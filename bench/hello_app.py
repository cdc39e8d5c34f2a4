"""A one-line Flask view: what the web stack costs when the application does nothing."""

from flask import Flask

app = Flask(__name__)


@app.get("/")
def hello() -> str:
    """Answer at once."""
    return "hello"
