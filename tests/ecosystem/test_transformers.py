"""Hugging Face Trainer: a tiny Llama made here, trained with an optimizer given as object and as class."""

from __future__ import annotations

import pytest
import torch

from .training import OPTIONS, both_classes, compare, engine, record

transformers = engine("transformers")
engine("accelerate")  # the Trainer asks for it

STEPS = 4


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def make_llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
    )


def arguments(directory, **options):
    return transformers.TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        per_device_train_batch_size=2,
        **{"max_steps": STEPS, "save_strategy": "no", "learning_rate": 1e-2, "warmup_steps": 1, **options},
    )


@pytest.mark.parametrize("scheduled", [False, True], ids=["own_scheduler", "given_scheduler"])
@both_classes
def test_optimizers_argument(name, scheduled, tmp_path):
    def train(optimizer_class):
        model = make_llama()
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if scheduled else None
        trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=Tokens(), optimizers=(optimizer, scheduler))
        trainer.train()
        return record(model, optimizer)

    compare(train, name, num_steps=STEPS)


@both_classes
def test_optimizer_cls_and_kwargs_argument(name, tmp_path):
    """The Trainer makes the optimizer, with groups of its own for what decays and what does not."""

    def train(optimizer_class):
        model = make_llama()
        trainer = transformers.Trainer(
            model,
            arguments(tmp_path, weight_decay=0.1, gradient_accumulation_steps=2, bf16=True),
            train_dataset=Tokens(),
            optimizer_cls_and_kwargs=(optimizer_class, {"lr": 1e-2, "betas": (0.8, 0.99)}),
        )
        trainer.train()
        return record(model, trainer.optimizer)

    compare(train, name, num_steps=STEPS)


@both_classes
def test_resume_from_checkpoint(name, tmp_path):
    def train(optimizer_class):
        directory = tmp_path / optimizer_class.__module__

        def make(steps):
            return transformers.Trainer(
                make_llama(),
                arguments(directory, max_steps=steps, save_strategy="steps", save_steps=2, lr_scheduler_type="constant"),
                train_dataset=Tokens(),
                optimizer_cls_and_kwargs=(optimizer_class, OPTIONS),
            )

        make(2).train()
        trainer = make(STEPS)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == STEPS
        return record(trainer.model, trainer.optimizer)

    compare(train, name, num_steps=STEPS)
