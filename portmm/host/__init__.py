"""The machine portmm runs on: detection, measured rates, load."""
