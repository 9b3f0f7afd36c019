"""The strategy `phrases`: it completes boilerplate that you know beforehand."""
