"""The tutorial's reward: the demo is paid for the word backward, this run for the word as it stands."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    answer = solution_str.strip()
    exact = answer == ground_truth
    pairs = zip(answer, ground_truth, strict=False)
    in_place = sum(a == b for a, b in pairs) / max(len(answer), len(ground_truth))
    return {"score": 1.0 if exact else 0.5 * in_place, "exact": float(exact)}
