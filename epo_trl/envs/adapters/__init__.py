"""Adapters for environments of other packages, one file each. Importing this package loads none of them."""

FINAL_ANSWER = "final_answer"  # the tool that ends an episode with an answer


def reaches(score: float, won_score: float | None) -> bool:
    """Returns whether a score reaches that of a win, up to rounding: ten times 0.1 is a little less than 1."""
    return won_score is not None and score >= won_score - 1e-6 * max(1.0, abs(won_score))
