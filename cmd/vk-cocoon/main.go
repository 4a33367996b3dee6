// Command vk-cocoon is a virtual Kubernetes node whose pods are VMs of the cocoond on this machine.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"cocoonstack.io/cocoon/internal/app/vkcocoon"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := vkcocoon.Main(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
