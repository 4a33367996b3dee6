// Package csitest is a CSI driver for tests: identity, node and registration service on unix sockets, in the process of the test.
//
// Its volumes are folders below a temporary one, and block devices. It checks that its caller keeps to the protocol, and fails the test
// otherwise. It mounts only if it is told to.
package csitest

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Options say what a driver is.
type Options struct {
	Name       string   // "": csi.test
	Endpoint   string   // that it registers; "": where its node service is
	Type       string   // that it registers; "": CSIPlugin
	Versions   []string // nil: 1.0.0
	NodeID     string   // "": node-1
	Topology   map[string]string
	MaxVolumes int64
	Able       []csi.NodeServiceCapability_RPC_Type

	Mount   bool              // publish by bind mounts, which needs root; else folders are only made
	Devices map[string]string // devices by volume; a volume without one gets a device node without a device, which needs root
}

// Driver is a driver that runs. It is safe for concurrent use.
type Driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	registration.UnimplementedRegistrationServer

	t      testing.TB
	o      Options
	dir    string
	socket string

	mu       sync.Mutex
	calls    []string
	states   []*registration.RegistrationStatus
	faults   map[string]*Fault
	volumes  map[string]*state
	register *grpc.Server
}

// state is what the driver knows of a volume.
type state struct {
	staging string
	device  bool
	targets []string
	size    int64
}

// Fault is what a driver does wrong at a call.
type Fault struct {
	Err   error         // the answer; nil: the right one
	Late  bool          // the driver does what it is asked before it answers Err
	Lie   any           // an answer that the driver gives without doing anything; nil: it gives none
	Until chan struct{} // nil, or closed when the driver may go on; it goes on, too, when the call is canceled
	Entry func()        // nil, or called at the call
}

// Start runs a driver until the test ends. It is not registered.
func Start(t testing.TB, o Options) *Driver {
	t.Helper()
	set := func(s *string, or string) {
		if *s == "" {
			*s = or
		}
	}
	set(&o.Name, "csi.test")
	set(&o.Type, registration.CSIPlugin)
	set(&o.NodeID, "node-1")
	if o.Versions == nil {
		o.Versions = []string{"1.0.0"}
	}
	dir, err := os.MkdirTemp("", "csitest") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	d := &Driver{t: t, o: o, dir: dir, socket: dir + "/csi.sock", faults: map[string]*Fault{}, volumes: map[string]*state{}}
	s := d.serve(d.socket)
	t.Cleanup(func() {
		d.Unregister()
		s.Stop()
		d.releaseAll()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return d
}

// serve serves all services at a socket.
func (d *Driver) serve(socket string) *grpc.Server {
	l, err := net.Listen("unix", socket)
	if err != nil {
		d.t.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(d.intercept))
	csi.RegisterIdentityServer(s, d)
	csi.RegisterNodeServer(s, d)
	registration.RegisterRegistrationServer(s, d)
	go func() { _ = s.Serve(l) }() // until Stop, which the test calls
	return s
}

// Register puts a registration socket in a folder and returns its path.
func (d *Driver) Register(plugins string) string {
	d.t.Helper()
	path := filepath.Join(plugins, d.o.Name+"-reg.sock")
	s := d.serve(path)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.register = s
	return path
}

// Unregister removes the registration socket, if there is one.
func (d *Driver) Unregister() {
	d.mu.Lock()
	s := d.register
	d.register = nil
	d.mu.Unlock()
	if s != nil {
		s.Stop() // closes and so removes the socket
	}
}

// On sets what the driver does wrong at a method, such as NodeStageVolume; nil: nothing.
func (d *Driver) On(method string, f *Fault) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults[method] = f
}

// Calls returns the calls of the node service that change volumes so far, in the form "METHOD VOLUME".
func (d *Driver) Calls() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.calls)
}

// Told returns what the driver has been told about its registration so far: "" or why it failed.
func (d *Driver) Told() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []string
	for _, s := range d.states {
		if s.GetPluginRegistered() != (s.GetError() == "") {
			d.t.Errorf("registration state %v contradicts itself", s)
		}
		out = append(out, s.GetError())
	}
	return out
}

// Left returns what is staged and published, sorted.
func (d *Driver) Left() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []string
	for id, v := range d.volumes {
		if v.staging != "" {
			out = append(out, fmt.Sprintf("%s staged at %s", id, v.staging))
		}
		for _, target := range v.targets {
			out = append(out, fmt.Sprintf("%s published at %s", id, target))
		}
	}
	slices.Sort(out)
	return out
}

// Reboot forgets what is staged and published, as a boot of the machine does. Mounts end.
func (d *Driver) Reboot() {
	d.releaseAll()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, v := range d.volumes {
		v.staging, v.targets = "", nil
	}
}

// Folder returns where the files of a volume are. It makes the folder.
func (d *Driver) Folder(volume string) string {
	dir := filepath.Join(d.dir, "volumes", fmt.Sprintf("%x", volume))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		d.t.Error(err)
	}
	return dir
}

func (d *Driver) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	method := filepath.Base(info.FullMethod)
	d.mu.Lock()
	f := d.faults[method]
	if v, ok := req.(interface{ GetVolumeId() string }); ok {
		d.calls = append(d.calls, method+" "+v.GetVolumeId())
	}
	d.mu.Unlock()
	if f == nil {
		return handle(ctx, req)
	}
	if f.Entry != nil {
		f.Entry()
	}
	if f.Until != nil {
		select {
		case <-f.Until:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if f.Lie != nil {
		return f.Lie, nil
	}
	if f.Err == nil {
		return handle(ctx, req)
	}
	if f.Late {
		if _, err := handle(ctx, req); err != nil {
			return nil, err
		}
	}
	return nil, f.Err
}

// GetInfo implements the registration service.
func (d *Driver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	endpoint := d.o.Endpoint
	if endpoint == "" {
		endpoint = d.socket
	}
	return &registration.PluginInfo{Type: d.o.Type, Name: d.o.Name, Endpoint: endpoint, SupportedVersions: d.o.Versions}, nil
}

// NotifyRegistrationStatus implements the registration service.
func (d *Driver) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.states = append(d.states, s)
	return &registration.RegistrationStatusResponse{}, nil
}

// GetPluginInfo implements the identity service.
func (d *Driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.o.Name, VendorVersion: "1"}, nil
}

// GetPluginCapabilities implements the identity service.
func (d *Driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

// Probe implements the identity service.
func (d *Driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}
