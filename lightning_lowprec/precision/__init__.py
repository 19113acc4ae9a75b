"""The precision plugins that Trainer and Fabric share: base, half precision, loss scaling."""
