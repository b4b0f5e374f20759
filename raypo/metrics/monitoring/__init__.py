"""Prometheus and Grafana beside a Ray that is running, and raypo's panels in them."""
