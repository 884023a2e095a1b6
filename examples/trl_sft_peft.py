"""Supervised fine-tuning with TRL and LoRA of PEFT, on our kernels: patch the model, then give it to SFTTrainer."""

import argparse

from datasets import Dataset
from peft import LoraConfig
from text import rows
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import powertrain
from powertrain.train.data.tokenizer import train_tokenizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

# yours: AutoTokenizer.from_pretrained(...) and a data set of text or messages
trained = train_tokenizer([bytes(row.tolist()).decode() for row in rows(32)], 300)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=trained.backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
)
texts = [bytes(row.tolist()).decode() for row in rows(32)]

config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(tokenizer),
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)
report = powertrain.patch(model)
arguments = SFTConfig(
    "runs/sft", max_steps=options.steps, per_device_train_batch_size=4, learning_rate=1e-2, max_length=64,
    report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, bf16=False,
)  # fmt: skip
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = SFTTrainer(
    model, arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer, peft_config=lora
)
result = trainer.train()
print(
    f"loss {result.training_loss:.3f} over {result.global_step} steps; {len(report.replaced)} kinds of parts replaced"
)
