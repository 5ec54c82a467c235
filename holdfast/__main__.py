"""`python -m holdfast`: the command."""

from holdfast import main

if __name__ == "__main__":
    main()
