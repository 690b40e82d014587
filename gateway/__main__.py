"""`python -m gateway`."""

from gateway.server import main

if __name__ == "__main__":
    main()
