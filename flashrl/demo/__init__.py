"""The demo: a real language model trained by GRPO on a CPU, its rollouts generated in 8 bit."""
