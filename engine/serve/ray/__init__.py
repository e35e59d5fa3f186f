"""The server as a Ray Serve application: replicas of it on the nodes of a cluster, behind Ray's HTTP proxies."""
