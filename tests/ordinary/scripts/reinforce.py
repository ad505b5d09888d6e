"""REINFORCE with a baseline, episodes played in the step, a dummy loader of ones (a common Lightning RL trick)."""

import lightning as L
import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader

L.seed_everything(521)


class Corridor:
    length = 5

    def reset(self):
        self.position, self.t = 2, 0
        return self.state()

    def state(self):
        return nn.functional.one_hot(torch.tensor(self.position), self.length).float()

    def step(self, action):
        self.t += 1
        self.position += 1 if action == 1 else -1
        done = self.position in (0, self.length - 1) or self.t >= 12
        return self.state(), (1.0 if self.position == self.length - 1 else 0.0), done


class Reinforce(L.LightningModule):
    def __init__(self, gamma=0.95, episodes_per_step=3):
        super().__init__()
        self.save_hyperparameters()
        self.policy = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
        self.baseline = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        self.env = Corridor()
        self.returns_seen = []

    @torch.no_grad()
    def play(self):
        states, actions, rewards = [], [], []
        state, done = self.env.reset(), False
        while not done:
            action = Categorical(logits=self.policy(state.to(self.device))).sample()
            states.append(state)
            actions.append(action)
            state, reward, done = self.env.step(action.item())
            rewards.append(reward)
        g, returns = 0.0, []
        for r in reversed(rewards):
            g = r + self.hparams.gamma * g
            returns.insert(0, g)
        self.returns_seen.append(returns[0])
        return torch.stack(states), torch.stack(actions), torch.tensor(returns)

    def training_step(self, batch, batch_idx):
        episodes = [self.play() for _ in range(self.hparams.episodes_per_step)]
        states, actions, returns = (torch.cat(parts).to(self.device) for parts in zip(*episodes, strict=True))
        values = self.baseline(states).squeeze(-1)
        dist = Categorical(logits=self.policy(states))
        policy_loss = -(dist.log_prob(actions) * (returns - values.detach())).mean()
        value_loss = nn.functional.mse_loss(values, returns)
        loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
        self.log_dict({"policy_loss": policy_loss, "value_loss": value_loss, "episode_len": len(states) / 3.0})
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


model = Reinforce()
trainer = L.Trainer(max_epochs=1, max_steps=10, log_every_n_steps=2, enable_checkpointing=False)
trainer.fit(model, DataLoader(torch.ones(20, 1), batch_size=1))
result_returns = model.returns_seen
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_steps = trainer.global_step
