"""`python -m crosscloud_lab` is the command `crosscloud-lab`."""

from crosscloud_lab.cli import main

if __name__ == "__main__":
    main()
