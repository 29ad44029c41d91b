from headrace.environments import Done, Environment, Observation, Turn


class Guess(Environment):
    """Says whether a number is too small or too large, until it is right."""

    def __init__(self, hint: str = "The number is {}.") -> None:
        self._hint = hint

    async def step(self, turn: Turn) -> Observation | Done:
        guess, number = int(turn.text), int(turn.task.ground_truth)
        if guess == number:
            return Done()
        return Observation(text=self._hint.format("larger" if guess < number else "smaller"))
