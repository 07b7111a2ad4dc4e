"""One small package a trainer, found by its entry point, and what they share.

- :mod:`~flashrl.trainers.corrections`: what people call a correction.
- :mod:`~flashrl.trainers.guards`: what keeps a bad rollout out of a loss.
- :mod:`~flashrl.trainers.metrics`: one vocabulary for every trainer's log.
- :mod:`~flashrl.trainers.patches`: changes to a framework, made and undone.
- :mod:`~flashrl.trainers.environment`: variables for the processes of a job.
- :mod:`~flashrl.trainers.logs`: warnings in those processes.
"""
