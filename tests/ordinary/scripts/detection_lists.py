"""torchvision's Faster R-CNN with lists of images and of target dicts as a batch (detection tutorials)."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

L.seed_everything(524)


class Shapes(Dataset):
    def __init__(self, n, size=32):
        self.samples = []
        for i in range(n):
            image = 0.1 * torch.rand(3, size, size)
            x0, y0 = torch.randint(0, size // 2, (2,)).tolist()
            w, h = torch.randint(6, size // 2, (2,)).tolist()
            label = 1 + i % 2
            image[label, y0 : y0 + h, x0 : x0 + w] = 1.0
            target = {
                "boxes": torch.tensor([[x0, y0, x0 + w, y0 + h]], dtype=torch.float32),
                "labels": torch.tensor([label]),
                "image_id": torch.tensor([i]),
            }
            self.samples.append((image, target))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


class Detector(L.LightningModule):
    def __init__(self):
        super().__init__()
        backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        backbone.out_channels = 16
        self.model = FasterRCNN(
            backbone,
            num_classes=3,
            min_size=32,
            max_size=32,
            rpn_anchor_generator=AnchorGenerator(sizes=((8, 16),), aspect_ratios=((0.5, 1.0, 2.0),)),
            box_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=3, sampling_ratio=2),
            rpn_pre_nms_top_n_train=50,
            rpn_post_nms_top_n_train=20,
            rpn_pre_nms_top_n_test=50,
            rpn_post_nms_top_n_test=20,
            box_batch_size_per_image=32,
            box_detections_per_img=5,
        )

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_idx):
        images, targets = batch
        targets = [dict(t) for t in targets]
        loss_dict = self.model(list(images), targets)
        losses = sum(loss for loss in loss_dict.values())
        self.log_dict(loss_dict, batch_size=len(images))
        return losses

    def validation_step(self, batch, batch_idx):
        images, _targets = batch
        outputs = self.model(list(images))
        found = [len(o["boxes"]) for o in outputs]
        self.log("boxes_found", sum(found) / len(found), batch_size=len(images))
        return outputs

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.0005)


train = DataLoader(Shapes(32), batch_size=4, shuffle=True, collate_fn=collate_fn)
val = DataLoader(Shapes(8), batch_size=4, collate_fn=collate_fn)
model = Detector()
trainer = L.Trainer(max_epochs=1, log_every_n_steps=2)
trainer.fit(model, train, val)
result_losses = {k: v.item() for k, v in trainer.callback_metrics.items()}
