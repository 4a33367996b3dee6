// Package nodev1 is the wire form of the node API: what cocoond serves on its socket, generated from node.proto.
//
// It holds no behaviour. Programs of ours use internal/nodeclient; others may generate their own client from node.proto.
package nodev1
