package nodecli

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Pull makes sure that an image is present. It reports no progress.
func (c *Client) Pull(ctx context.Context, r image.PullRequest, _ func(image.Progress)) (image.Image, error) {
	args := []string{"image", "pull", "--output=json", "--quiet"}
	switch r.Policy {
	case image.PullIfNotPresent:
		args = append(args, "--policy=missing")
	case image.PullNever:
		args = append(args, "--policy=never")
	case image.PullAlways, "":
		args = append(args, "--policy=always")
	default:
		return image.Image{}, errdefs.Invalidf("invalid pull policy %q; use Always, IfNotPresent or Never", r.Policy)
	}
	if r.Force {
		args = append(args, "--force")
	}
	x := call{args: args}
	if err := x.passAuth(r.Auth); err != nil {
		return image.Image{}, err
	}
	x.args = append(x.args, "--", r.Name)
	return ask[image.Image](ctx, c, x)
}

// dockerConfig encodes the credentials as a docker configuration. The result is secret.
func dockerConfig(all []image.RegistryAuth) ([]byte, error) {
	type entry struct {
		Username      string `json:"username,omitempty"`
		Password      string `json:"password,omitempty"`
		RegistryToken string `json:"registrytoken,omitempty"`
	}
	auths := map[string]entry{}
	for _, a := range all {
		if _, ok := auths[a.Registry]; !ok { // the first match wins
			auths[a.Registry] = entry{a.Username, a.Password, a.Token}
		}
	}
	text, err := json.Marshal(map[string]any{"auths": auths})
	if err != nil {
		return nil, errdefs.New(errdefs.Internal, "encode credentials of registries") // without the cause: it is secret
	}
	return text, nil
}

func (c *Client) snapshot(ctx context.Context, x call) (snapshot.Snapshot, error) {
	s, err := ask[nodejson.Snapshot](ctx, c, x)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	return s.Value(), nil
}

// SaveSnapshot saves a running VM, which keeps running, or the disks of a stopped one.
func (c *Client) SaveSnapshot(ctx context.Context, ref string, s vm.SaveSpec) (snapshot.Snapshot, error) {
	args := []string{"snapshot", "save", "--output=json", "--name=" + s.Name, "--description=" + s.Description, "--quiesce=" + strconv.FormatBool(s.Quiesce)}
	return c.snapshot(ctx, call{args: append(append(args, labels(s.Labels)...), "--", ref)})
}

func labels(m map[string]string) []string {
	var args []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		args = append(args, "--label="+k+"="+m[k])
	}
	return args
}

// CloneWithImage makes a VM that resumes from a snapshot. The snapshot's image is fetched by its digest if it is not
// present.
func (c *Client) CloneWithImage(ctx context.Context, s vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error) {
	args := []string{"vm", "clone", "--output=json", "--wait=false", "--pull"}
	for flag, value := range map[string]string{"--name": s.Name, "--hostname": s.Hostname, "--from-dir": s.FromDir} {
		if value != "" {
			args = append(args, flag+"="+value)
		}
	}
	nics := len(s.NICs)
	if s.Keep.NICs {
		nics = 0
	}
	for flag, value := range map[string]int64{"--cpu": int64(s.CPUs), "--memory": s.Memory, "--storage": s.Storage, "--nics": int64(nics)} {
		if value != 0 {
			args = append(args, flag+"="+strconv.FormatInt(value, 10))
		}
	}
	for i, n := range s.NICs {
		switch {
		case n.MAC != "" || n.Network != s.NICs[0].Network:
			return vm.Record{}, errdefs.Unsupportedf("interfaces of a clone cannot differ when cocoon is run as a command")
		case i == 0 && n.Network != "":
			args = append(args, "--network="+n.Network)
		}
	}
	if s.SSHHostKeys {
		args = append(args, "--ssh-host-keys")
	}
	if s.Cold {
		args = append(args, "--cold")
	}
	if s.StopGrace > 0 {
		args = append(args, "--stop-grace="+s.StopGrace.String())
	}
	x := call{args: args}
	if err := x.passAuth(auth); err != nil {
		return vm.Record{}, err
	}
	x.args = append(x.args, labels(s.Labels)...)
	if s.Snapshot != "" {
		x.args = append(x.args, "--", s.Snapshot)
	}
	return c.record(ctx, x)
}

// Hibernate saves a running VM under name and ends its process once everything is durable.
func (c *Client) Hibernate(ctx context.Context, ref, name string) (vm.Record, error) {
	return c.record(ctx, call{args: []string{"vm", "hibernate", "--output=json", "--snapshot=" + name, "--", ref}})
}

// Wake resumes a hibernated VM. It does not wait for the guest.
func (c *Client) Wake(ctx context.Context, ref string) (vm.Record, error) {
	return c.record(ctx, call{args: []string{"vm", "wake", "--output=json", "--wait=false", "--", ref}})
}

// GetSnapshot returns one snapshot.
func (c *Client) GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	return c.snapshot(ctx, call{args: []string{"snapshot", "inspect", "--", ref}})
}

// ListSnapshots returns every snapshot, sorted by name.
func (c *Client) ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error) {
	list, err := ask[[]nodejson.Snapshot](ctx, c, call{args: []string{"snapshot", "list", "--output=json"}})
	if err != nil {
		return nil, err
	}
	all := make([]snapshot.Snapshot, len(list))
	for i, s := range list {
		all[i] = s.Value()
	}
	return all, nil
}

// RemoveSnapshot deletes a snapshot.
func (c *Client) RemoveSnapshot(ctx context.Context, ref string) error {
	return c.do(ctx, call{args: []string{"snapshot", "rm", "--", ref}})
}

// remote is a call with the credentials for the registry of ref.
func remote(args []string, ref string, auth snapshot.Auth) (call, error) {
	x := call{args: args}
	if len(auth.CA) > 0 {
		x.pass("--ca-cert", auth.CA)
	}
	switch {
	case auth.Token != "":
		x.pass("--token-file", []byte(auth.Token))
	case auth.Username != "" || auth.Password != "":
		_, rest, ok := strings.Cut(ref, "://")
		if !ok {
			rest = ref
		}
		host, _, _ := strings.Cut(rest, "/")
		return x, x.passAuth([]image.RegistryAuth{{Registry: host, Username: auth.Username, Password: auth.Password}})
	}
	return x, nil
}

// transfer runs a command that ends with positional arguments and prints a snapshot.
func (c *Client) transfer(ctx context.Context, args []string, ref string, auth snapshot.Auth, last ...string) (snapshot.Snapshot, error) {
	x, err := remote(args, ref, auth)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	x.args = append(append(x.args, "--"), last...)
	return c.snapshot(ctx, x)
}

// PushSnapshot sends a snapshot to a registry. It reports no progress.
func (c *Client) PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, _ func(snapshot.Progress)) (snapshot.Snapshot, error) {
	return c.transfer(ctx, []string{"snapshot", "push", "--output=json"}, to, auth, ref, to)
}

// PullSnapshot fetches one from a registry, or with cocoon://HOST:PORT/NAME from another node. It reports no progress.
func (c *Client) PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, _ func(snapshot.Progress)) (snapshot.Snapshot, error) {
	return c.transfer(ctx, []string{"snapshot", "pull", "--output=json", "--name=" + name}, from, auth, from)
}

// PullSnapshotEarly is PullSnapshot, but it returns before the memory is here if VMs can resume before that.
func (c *Client) PullSnapshotEarly(ctx context.Context, from, name string, auth snapshot.Auth, _ func(snapshot.Progress)) (snapshot.Snapshot, error) {
	return c.transfer(ctx, []string{"snapshot", "pull", "--early", "--output=json", "--name=" + name}, from, auth, from)
}

// TagDigest returns the digest of the manifest ref in a registry. NotFound.
func (c *Client) TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error) {
	x, err := remote([]string{"snapshot", "remote", "digest"}, ref, auth)
	if err != nil {
		return "", err
	}
	x.args = append(x.args, "--", ref)
	d, err := ask[nodejson.TagDigest](ctx, c, x)
	if err == nil && d.Digest == "" {
		err = fmt.Errorf("%s printed no digest for %s", c.binary, ref)
	}
	return d.Digest, err
}

// DeleteTag removes a tag. It is no error if the tag does not exist.
func (c *Client) DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error {
	return c.atRegistry(ctx, "rm", ref, auth)
}

// CheckRegistry checks that the registry of ref answers and accepts the credentials.
func (c *Client) CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error {
	return c.atRegistry(ctx, "check", ref, auth)
}

func (c *Client) atRegistry(ctx context.Context, verb, ref string, auth snapshot.Auth) error {
	x, err := remote([]string{"snapshot", "remote", verb}, ref, auth)
	if err != nil {
		return err
	}
	x.args = append(x.args, "--", ref)
	return c.do(ctx, x)
}
