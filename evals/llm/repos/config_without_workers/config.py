from dataclasses import dataclass, field


@dataclass
class DataConfig:
    batch_size: int = 12
    num_workers: int = 0
    length: int = 6000


@dataclass
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    lr: float = 2e-4
    max_iters: int = 250
