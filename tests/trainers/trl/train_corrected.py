"""A user's script: TRL's stock one, but for the trainer's class and its correction."""

import reward
from datasets import load_dataset
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser

from flashrl.trainers.trl.corrected import CorrectedGRPOTrainer

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args, _ = parser.parse_args_and_config(
        return_remaining_strings=True
    )
    training_args.model_init_kwargs = {"dtype": model_args.dtype}
    trainer = CorrectedGRPOTrainer(
        correction="skyrl_geometric",
        model=model_args.model_name_or_path,
        reward_funcs=reward.reward,
        args=training_args,
        train_dataset=load_dataset(script_args.dataset_name)["train"],
    )
    trainer.train()
