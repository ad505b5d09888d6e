"""Classification of point clouds: PointNet, and the data sets it trains on."""
