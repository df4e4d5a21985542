"""Environments that were written for other packages, one file each. Importing this package loads none of them."""

FINAL_ANSWER = "final_answer"  # the tool that ends an episode with an answer
