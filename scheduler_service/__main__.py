"""`python -m scheduler_service`."""

from scheduler_service.server import main

if __name__ == "__main__":
    main()
