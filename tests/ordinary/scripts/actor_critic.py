"""Advantage actor-critic: episodes are played inside train_dataloader's dataset, two optimizers (bolts' A2C style)."""

import lightning as L
import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

L.seed_everything(9)


class Bandit:
    """A contextual bandit with four contexts and three arms, played for ten rounds."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(4)
        self.payoff = torch.rand(4, 3, generator=self.generator)

    def reset(self):
        return torch.randn(4, generator=self.generator)

    def step(self, context, arm):
        reward = self.payoff[context.argmax(), arm].item()
        return torch.randn(4, generator=self.generator), reward


class ActorCritic(nn.Module):
    def __init__(self, n_obs, n_actions, hidden=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.actor = nn.Linear(hidden, n_actions)
        self.critic = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.log_softmax(self.actor(h), dim=-1), self.critic(h).squeeze(-1)


class Experience(IterableDataset):
    def __init__(self, generate):
        self.generate = generate

    def __iter__(self):
        return self.generate()


class A2C(L.LightningModule):
    def __init__(self, gamma=0.9, rollout=12, rollouts=6, entropy_beta=0.01, critic_beta=0.5, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.env = Bandit()
        self.net = ActorCritic(4, 3)
        self.state = self.env.reset()
        self.rewards_seen = []

    def forward(self, x):
        return self.net(x)

    def rollouts(self):
        for _ in range(self.hparams.rollouts):
            states, actions, rewards = [], [], []
            for _ in range(self.hparams.rollout):
                with torch.no_grad():
                    logprobs, value = self.net(self.state.to(self.device).unsqueeze(0))
                action = Categorical(logits=logprobs[0]).sample().item()
                states.append(self.state)
                actions.append(action)
                self.state, reward = self.env.step(self.state, action)
                rewards.append(reward)
            with torch.no_grad():
                _, value = self.net(self.state.to(self.device).unsqueeze(0))
            g = value[0].item()
            returns = []
            for reward in reversed(rewards):
                g = reward + self.hparams.gamma * g
                returns.append(g)
            self.rewards_seen.append(sum(rewards) / len(rewards))
            yield from zip(states, actions, reversed(returns), strict=True)

    def training_step(self, batch, batch_idx):
        states, actions, returns = batch
        returns = returns.float()
        logprobs, values = self.net(states)
        with torch.no_grad():
            advs = returns - values
            advs = (advs - advs.mean()) / (advs.std() + 1e-7)
        entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
        actor_loss = -(logprobs[torch.arange(len(actions)), actions] * advs).mean()
        critic_loss = self.hparams.critic_beta * torch.square(returns - values).mean()
        loss = actor_loss + critic_loss - self.hparams.entropy_beta * entropy
        self.log_dict({"loss": loss, "actor": actor_loss, "critic": critic_loss, "entropy": entropy})
        self.log("reward", self.rewards_seen[-1], prog_bar=True)
        return loss

    def train_dataloader(self):
        return DataLoader(Experience(self.rollouts), batch_size=self.hparams.rollout)

    def configure_optimizers(self):
        return torch.optim.Adam(
            [
                {"params": self.net.body.parameters()},
                {"params": self.net.actor.parameters(), "lr": 1e-3},
                {"params": self.net.critic.parameters()},
            ],
            lr=self.hparams.lr,
        )


model = A2C()
trainer = L.Trainer(max_epochs=2, gradient_clip_val=0.5, log_every_n_steps=3, enable_checkpointing=False)
trainer.fit(model)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_rewards = model.rewards_seen
