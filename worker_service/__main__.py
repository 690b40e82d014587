"""`python -m worker_service`."""

from worker_service.server import main

if __name__ == "__main__":
    main()
