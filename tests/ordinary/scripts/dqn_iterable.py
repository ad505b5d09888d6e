"""DQN with a replay buffer behind an IterableDataset and a target network (lightning-bolts / PL's RL tutorial)."""

from collections import deque, namedtuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataset import IterableDataset

pl.seed_everything(123)

Experience = namedtuple("Experience", field_names=["state", "action", "reward", "done", "new_state"])


class LineWorld:
    """Walk to the right end of a line (no gym needed)."""

    n_states, n_actions = 6, 2

    def reset(self):
        self.position, self.t = 0, 0
        return self.observe()

    def observe(self):
        state = np.zeros(self.n_states, dtype=np.float32)
        state[self.position] = 1.0
        return state

    def step(self, action):
        self.t += 1
        self.position = min(max(self.position + (1 if action == 1 else -1), 0), self.n_states - 1)
        done = self.position == self.n_states - 1 or self.t >= 20
        reward = 1.0 if self.position == self.n_states - 1 else -0.05
        return self.observe(), reward, done


class DQN(nn.Module):
    def __init__(self, obs_size, n_actions, hidden_size=24):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, n_actions),
        )

    def forward(self, x):
        return self.net(x.float())


class ReplayBuffer:
    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)

    def __len__(self):
        return len(self.buffer)

    def append(self, experience):
        self.buffer.append(experience)

    def sample(self, batch_size):
        indices = np.random.choice(len(self.buffer), batch_size, replace=False)
        states, actions, rewards, dones, next_states = zip(*(self.buffer[idx] for idx in indices), strict=True)
        return (
            np.array(states),
            np.array(actions),
            np.array(rewards, dtype=np.float32),
            np.array(dones, dtype=bool),
            np.array(next_states),
        )


class RLDataset(IterableDataset):
    def __init__(self, buffer, sample_size=80):
        self.buffer = buffer
        self.sample_size = sample_size

    def __iter__(self):
        states, actions, rewards, dones, new_states = self.buffer.sample(self.sample_size)
        for i in range(len(dones)):
            yield states[i], actions[i], rewards[i], dones[i], new_states[i]


class Agent:
    def __init__(self, env, replay_buffer):
        self.env = env
        self.replay_buffer = replay_buffer
        self.reset()

    def reset(self):
        self.state = self.env.reset()

    def get_action(self, net, epsilon, device):
        if np.random.random() < epsilon:
            return np.random.randint(self.env.n_actions)
        state = torch.tensor(self.state, device=device).unsqueeze(0)
        q_values = net(state)
        return int(q_values.argmax(dim=1).item())

    @torch.no_grad()
    def play_step(self, net, epsilon=0.0, device="cpu"):
        action = self.get_action(net, epsilon, device)
        new_state, reward, done = self.env.step(action)
        self.replay_buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = new_state
        if done:
            self.reset()
        return reward, done


class DQNLightning(pl.LightningModule):
    def __init__(self, batch_size=10, lr=1e-2, gamma=0.95, sync_rate=4, replay_size=500, eps_last_frame=20):
        super().__init__()
        self.save_hyperparameters()
        self.env = LineWorld()
        self.net = DQN(self.env.n_states, self.env.n_actions)
        self.target_net = DQN(self.env.n_states, self.env.n_actions)
        self.buffer = ReplayBuffer(self.hparams.replay_size)
        self.agent = Agent(self.env, self.buffer)
        self.total_reward = 0
        self.episode_reward = 0
        self.populate(200)

    def populate(self, steps):
        for _ in range(steps):
            self.agent.play_step(self.net, epsilon=1.0)

    def forward(self, x):
        return self.net(x)

    def dqn_mse_loss(self, batch):
        states, actions, rewards, dones, next_states = batch
        state_action_values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_state_values = self.target_net(next_states).max(1)[0]
            next_state_values[dones] = 0.0
            next_state_values = next_state_values.detach()
        expected_state_action_values = next_state_values * self.hparams.gamma + rewards
        return nn.MSELoss()(state_action_values, expected_state_action_values)

    def get_epsilon(self, start=1.0, end=0.05):
        if self.global_step > self.hparams.eps_last_frame:
            return end
        return start - (self.global_step / self.hparams.eps_last_frame) * (start - end)

    def training_step(self, batch, nb_batch):
        epsilon = self.get_epsilon()
        self.log("epsilon", epsilon)

        # step through environment with agent
        reward, done = self.agent.play_step(self.net, epsilon, self.device)
        self.episode_reward += reward
        self.log("episode reward", self.episode_reward)

        # calculates training loss
        loss = self.dqn_mse_loss(batch)
        if done:
            self.total_reward = self.episode_reward
            self.episode_reward = 0

        # Soft update of target network
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())

        self.log_dict({"reward": reward, "train_loss": loss})
        self.log("total_reward", self.total_reward, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)

    def train_dataloader(self):
        return DataLoader(RLDataset(self.buffer), batch_size=self.hparams.batch_size)


model = DQNLightning()
trainer = pl.Trainer(max_epochs=3, gradient_clip_val=1.0, log_every_n_steps=4)
trainer.fit(model)
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
with torch.no_grad():
    result_q_values = model(torch.eye(6))
