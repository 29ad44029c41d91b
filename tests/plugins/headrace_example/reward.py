def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 for an answer that contains the truth, less the more there is around it."""
    if ground_truth not in solution_str:
        return 0.0
    return len(ground_truth) / len(solution_str.strip())
