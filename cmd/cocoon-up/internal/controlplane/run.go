// Package controlplane runs etcd, kube-apiserver, kube-controller-manager and
// kube-scheduler in one process. It creates no certificates and runs no node.
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	// Imported for their side effects: the JSON log format and client metrics.
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"

	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app/options"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app/options"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app/options"

	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/config"
)

// How long each part may take to stop. The sum stays below ten seconds, because
// a caller may kill the process after that time.
const (
	stopClients   = 3 * time.Second
	stopAPIServer = 3 * time.Second
	stopEtcd      = 3 * time.Second
)

// errEtcdBusy means that etcd did not stop in time. Its data is safe.
var errEtcdBusy = errors.New("etcd did not close in time")

// plane is the running control plane. Fields are set in the order in which
// parts are started. The field of a part that is not started is nil.
type plane struct {
	log    *slog.Logger
	failed chan error

	etcd      *etcd
	apiserver *component
	clients   []*component

	apiserverOptions *apiserver.ServerRunOptions
	managerOptions   *manager.KubeControllerManagerOptions
	schedulerOptions *scheduler.Options
}

// Run runs the control plane until ctx ends or a part of it fails, and
// then stops it within ten seconds. It returns nil after a clean stop that
// ctx requested. A process can call it only once, because the components
// keep global state.
func Run(ctx context.Context, c *config.Config, log *slog.Logger) (err error) {
	p := &plane{log: log, failed: make(chan error, 4)}
	if err := p.configure(c); err != nil {
		return err
	}
	unlock, err := lockDir(c.DataDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	defer func() { err = errors.Join(err, p.stop()) }()

	if err := p.start(ctx, c); err != nil {
		if ctx.Err() != nil {
			return nil // stopped while starting
		}
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-p.failed:
		return err
	case err := <-p.etcd.Err():
		return fmt.Errorf("etcd: %w", err)
	}
}

// configure checks all options before anything is started.
func (p *plane) configure(c *config.Config) (err error) {
	if p.apiserverOptions, err = newAPIServer(c); err != nil {
		return err
	}
	if p.managerOptions, err = newManager(c); err != nil {
		return err
	}
	if !c.ExternalScheduler {
		p.schedulerOptions, err = newScheduler(c)
	}
	return err
}

// start returns nil once the API server is ready and its clients are started.
func (p *plane) start(ctx context.Context, c *config.Config) (err error) {
	began := time.Now()
	if p.etcd, err = startEtcd(ctx, c); err != nil {
		return err
	}
	p.log.Info("etcd ready", "dur", time.Since(began))

	p.apiserver = start(ctx, "kube-apiserver", p.failed, func(ctx context.Context) error {
		return runAPIServer(ctx, p.apiserverOptions)
	})
	if err := p.waitAPIServer(ctx, c.ControllerManager.Kubeconfig); err != nil {
		return err
	}
	p.log.Info("api server ready", "port", c.SecurePort, "dur", time.Since(began))

	p.clients = []*component{
		start(ctx, "kube-controller-manager", p.failed, func(ctx context.Context) error {
			return runManager(ctx, p.managerOptions)
		}),
	}
	if p.schedulerOptions != nil {
		p.clients = append(p.clients, start(ctx, "kube-scheduler", p.failed, func(ctx context.Context) error {
			return runScheduler(ctx, p.schedulerOptions)
		}))
	}
	p.log.Info("control plane started", "dur", time.Since(began))
	return nil
}

func (p *plane) waitAPIServer(ctx context.Context, kubeconfig string) error {
	var probe sync.WaitGroup
	defer probe.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer := make(chan error, 1)
	probe.Go(func() { answer <- waitReady(ctx, kubeconfig) })
	select {
	case err := <-answer:
		return err
	case err := <-p.failed:
		return err
	}
}

// stop stops the started parts in reverse order, so that each part can still
// reach what it depends on.
func (p *plane) stop() error {
	began := time.Now()
	for _, c := range p.clients {
		c.cancel()
	}
	for _, c := range p.clients {
		if !c.stop(stopClients - time.Since(began)) {
			p.log.Warn("component did not stop in time", "component", c.name)
		}
	}
	if p.apiserver != nil && !p.apiserver.stop(stopAPIServer) {
		p.log.Warn("component did not stop in time", "component", p.apiserver.name)
	}
	if p.etcd != nil && !p.etcd.stop(stopEtcd) {
		return errEtcdBusy
	}
	p.log.Info("control plane stopped", "dur", time.Since(began))
	return nil
}
