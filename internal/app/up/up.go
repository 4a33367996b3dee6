// Package up runs a whole cluster on one machine: a Kubernetes control plane, cocoond with the virtual node in it, and
// their supporting programs, all in one folder, on loopback and on private bridges.
//
// It supervises processes and writes their configurations; it does none of their work.
package up

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
)

// Options are the user's options for `cocoon up`. Zero values keep the choice of an earlier start of the instance.
type Options struct {
	Dir         string
	Nodes       *int     // number of virtual nodes; with 0 the instance is only a control plane
	NodeName    string   // of the first node
	With        []string // what runs besides them: the names in parts
	APIPort     int
	NodePort    int // of the first node
	MetricsPort int // of the first node
	EpochPort   int
	ManagerPort int
	WebhookPort int
	ExtraConfig []string // flags of the control plane's components: COMPONENT.FLAG=VALUE
	Services    *bool    // serve Services and the cluster's DNS; nil: if nothing else on this machine does
	AllowImages []string // sources of pods' images besides public addresses; nil: keep the earlier choice
	HostPaths   []string // folders of this machine that VMs may share; nil: keep the earlier choice
	CSIPlugins  *string  // folder in which CSI drivers of this machine register, "" for none; nil: keep the earlier choice
	Kubelet     *bool    // a second node with a kubelet and containerd; nil: keep the earlier choice
	CNIConfDir  *string  // folder of conflists that are networks beside the bridge, "" for none; nil: keep the earlier choice
	Assets      Assets

	CPUOvercommit int // virtual CPUs that pods may request for each CPU of this machine
}

// Report is called after each step, with the time that it took.
type Report func(step string, took time.Duration)

const (
	readyLimit  = 3 * time.Minute       // for the whole start
	pollReady   = 25 * time.Millisecond // between checks of a server that is starting
	stopControl = 15 * time.Second      // between SIGTERM and SIGKILL of the control plane
	stopDaemon  = 20 * time.Second      // the same for cocoond
	stopGuests  = 60 * time.Second      // for all VMs of the instance to stop on `cocoon down`
	demoImage   = "cocoon/demo:latest"
	demoDisk    = "cocoon/disk-demo:latest"
)

// instance is one cluster, from Options to the end of its supervisor.
type instance struct {
	layout
	opts     Options
	settings Settings
	ports    ports
	pki      pki
	api      *apiClient
	report   Report
	log      *slog.Logger
	spawner  *spawner
	services bool // this start serves Services
}

// Run starts the instance, calls ready, supervises it until ctx ends and then stops it in order.
// Errors: AlreadyExists when the instance of the folder is up, InvalidArgument, ResourceExhausted for a taken port,
// FailedPrecondition where the host lacks something, Canceled when ctx ends before the cluster is ready.
func Run(ctx context.Context, o Options, log *slog.Logger, report Report, ready func()) error {
	if err := preflight(o); err != nil {
		return err
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return fmt.Errorf("locate %s: %w", o.Dir, err)
	}
	in := &instance{layout: layout{dir}, opts: o, report: report, log: log, spawner: newSpawner()}
	for _, d := range []string{"", "etc", "etc/images.d", "log", "run"} {
		if err := os.MkdirAll(in.join(d), 0o700); err != nil {
			return fmt.Errorf("create instance folder: %w", err)
		}
	}
	lock, err := lockInstance(in.lock())
	if err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	defer lock.Close()
	defer in.ports.Close()
	if err := in.prepare(ctx); err != nil {
		return err
	}
	return in.supervise(ctx, ready)
}

// prepare writes every certificate and configuration file. It is idempotent.
func (in *instance) prepare(ctx context.Context) (err error) {
	began := time.Now()
	if in.settings, err = settle(in.layout, in.opts, &in.ports); err != nil {
		return err
	}
	if err := in.claimServices(); err != nil {
		return err
	}
	in.pki = pki{dir: in.join("pki"), now: time.Now()}
	if err := in.pki.ensure(in.settings); err != nil {
		return err
	}
	if in.api, err = newAPIClient(in.pki, in.settings); err != nil {
		return err
	}
	for _, user := range []string{"controller-manager", "scheduler"} {
		if err := writeKubeconfig(in.config(user+".kubeconfig"), in.pki, in.settings, user); err != nil {
			return err
		}
	}
	for i := range in.settings.Nodes {
		n := in.node(in.settings, i)
		if err := os.MkdirAll(n.folder("run"), 0o700); err != nil {
			return fmt.Errorf("create folder of node %s: %w", n.name, err)
		}
		if err := writeKubeconfig(n.kubeconfig(), in.pki, in.settings, n.suffixed("node")); err != nil {
			return err
		}
		if err := writeYAML(n.daemonConfig(), cocoondConfig(n, in.pki, in.settings, in.opts.Assets, in.services)); err != nil {
			return err
		}
	}
	if err := in.prepareKubelet(ctx); err != nil {
		return err
	}
	for _, name := range in.settings.With {
		if err := in.part(name).prepare(); err != nil {
			return err
		}
	}
	if err := writeYAML(in.config("control-plane.yaml"), controlPlaneConfig(in.layout, in.pki, in.settings)); err != nil {
		return err
	}
	in.report("certificates and configuration", time.Since(began))
	return nil
}

func (in *instance) controlPlane() child {
	return child{
		name: "control-plane", path: in.opts.Assets.ControlPlane,
		args: []string{"control-plane", "--config", in.config("control-plane.yaml")},
		log:  in.layout.log("control-plane"), stop: stopControl,
	}
}

func (in *instance) daemon(n nodeLayout) child {
	name := n.suffixed("cocoond")
	return child{
		name: name, path: in.opts.Assets.Daemon,
		args: []string{"--config", n.daemonConfig()},
		log:  in.layout.log(name), stop: stopDaemon,
	}
}

// supervise starts the children in order, waits until the cluster is usable, and stops them in reverse order.
func (in *instance) supervise(ctx context.Context, ready func()) error {
	startCtx, cancelStart := context.WithTimeout(ctx, readyLimit)
	defer cancelStart()
	stopped := in.startAll(startCtx, ready)
	err := stopped.err
	if err == nil {
		<-ctx.Done()
		in.log.Info("stopping")
	}
	stopped.stop()
	if sweepErr := sweepKubelet(ctx, in.kubelet()); err == nil {
		err = sweepErr
	}
	if in.services {
		if dropErr := dropServices(in.layout); err == nil {
			err = dropErr
		}
	}
	if downErr := stopVMsOf(context.WithoutCancel(ctx), in.layout, in.opts.Assets); err == nil {
		err = downErr
	}
	return err
}

// running is what startAll started.
type running struct {
	stop func()
	err  error
}

func (in *instance) startAll(ctx context.Context, ready func()) running {
	var stops []func()
	r := running{stop: func() {
		for i := len(stops) - 1; i >= 0; i-- {
			stops[i]()
		}
	}}
	launch := func(c child) <-chan error {
		ended := make(chan error, 1)
		cctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		var wg sync.WaitGroup
		wg.Go(func() { in.spawner.keep(cctx, c, in.log, ended) })
		stops = append(stops, func() { cancel(); wg.Wait() })
		return ended
	}

	began := time.Now()
	ended := launch(in.controlPlane())
	if r.err = in.await(ctx, in.controlPlane(), ended, in.api.ready); r.err != nil {
		return r
	}
	in.report("control plane answers", time.Since(began))

	if r.err = in.checkKubeVirt(ctx); r.err != nil {
		return r
	}
	began = time.Now()
	if r.err = in.installManifests(ctx, ended, baseManifests...); r.err != nil {
		return r
	}
	if r.err = in.unregisterKubeVirt(ctx); r.err != nil {
		return r
	}
	if !in.settings.with(partManager) {
		if r.err = in.unregisterWebhooks(ctx); r.err != nil {
			return r
		}
	}
	in.report("custom resources are installed", time.Since(began))

	var answer []func() error // parts become ready while the nodes start
	for _, name := range in.settings.With {
		part := in.part(name)
		if part.late {
			continue
		}
		began := time.Now()
		if r.err = in.installManifests(ctx, ended, part.install...); r.err != nil {
			return r
		}
		ended := launch(part.child)
		answer = append(answer, func() error {
			err := in.await(ctx, part.child, ended, part.ready)
			if err == nil {
				in.report(name+" answers", time.Since(began))
			}
			return err
		})
	}

	for i := range in.settings.Nodes {
		if r.err = in.startNode(ctx, i, launch); r.err != nil {
			return r
		}
	}
	for _, wait := range answer {
		if r.err = wait(); r.err != nil {
			return r
		}
	}
	also := func(stop func()) { stops = append(stops, stop) }
	if r.err = in.runServices(ctx, launch, also); r.err != nil {
		return r
	}
	if r.err = in.registerKubeVirt(ctx, also); r.err != nil {
		return r
	}
	if r.err = in.runMetricsServer(ctx, launch); r.err != nil {
		return r
	}
	if r.err = in.runKubelet(ctx, launch); r.err != nil {
		return r
	}
	if r.err = writeKubeconfig(in.kubeconfig(), in.pki, in.settings, "admin"); r.err == nil {
		ready()
	}
	return r
}

// await polls ok until it returns true. It fails when the child ends first or ctx ends.
func (in *instance) await(ctx context.Context, c child, ended <-chan error, ok func(context.Context) bool) error {
	tick := time.NewTicker(pollReady)
	defer tick.Stop()
	for !ok(ctx) {
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return fmt.Errorf("interrupted while %s was starting: %w", c.name, ctx.Err())
			}
			return errdefs.Unavailablef("%s was not ready in time (%w); read its log %s", c.name, ctx.Err(), c.log)
		case err := <-ended:
			return errdefs.Unavailablef("%s ended while starting (%w): %s", c.name, err, lastLine(c.log))
		case <-tick.C:
		}
	}
	return nil
}

// startNode starts one virtual node and waits until pods can run there.
func (in *instance) startNode(ctx context.Context, i int, launch func(child) <-chan error) error {
	n := in.node(in.settings, i)
	began := time.Now()
	since := began.Truncate(time.Second)
	daemon := in.daemon(n)
	ended := launch(daemon)
	if err := in.await(ctx, daemon, ended, n.answers); err != nil {
		return err
	}
	if err := in.settleAddress(i); err != nil {
		return err
	}
	in.report(daemon.name+" answers", time.Since(began))

	began = time.Now()
	if err := n.importDemos(ctx, in.opts.Assets); err != nil {
		return err
	}
	in.report("images "+demoImage+" and "+demoDisk, time.Since(began))

	began = time.Now()
	err := in.await(ctx, daemon, ended, func(ctx context.Context) bool {
		return in.api.nodeReady(ctx, n.name, since) && in.api.hasDefaultServiceAccount(ctx)
	})
	if err != nil {
		return err
	}
	if err := in.api.labelNode(ctx, n.name); err != nil {
		return err
	}
	in.report("node "+n.name+" is Ready", time.Since(began))
	return nil
}

func (n nodeLayout) answers(ctx context.Context) bool {
	c, err := nodeclient.Dial(n.socket())
	if err != nil {
		return false
	}
	defer c.Close()
	_, err = c.List(ctx)
	return err == nil
}

// importDemos makes the demo images available without network access. An instance that has an image keeps it.
func (n nodeLayout) importDemos(ctx context.Context, a Assets) error {
	c, err := nodeclient.Dial(n.socket())
	if err != nil {
		return fmt.Errorf("import demo images: %w", err)
	}
	defer c.Close()
	return errors.Join(importImage(ctx, c, demoImage, a.DemoImage), importImage(ctx, c, demoDisk, a.DemoDisk))
}

func importImage(ctx context.Context, c *nodeclient.Client, name, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("import image %s: %w", name, err)
	}
	defer f.Close()
	if _, err := c.ImportImage(ctx, name, f, nil); err != nil {
		return fmt.Errorf("import image %s: %w", name, err)
	}
	return nil
}
