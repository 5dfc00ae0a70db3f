"""What may be wrong with a machine or a launch: facts of each rank, gathered, judged by pure functions.

machine, launcher, files, transport  ->  RankFacts of every rank  ->  judge  ->  Findings  ->  text
"""
