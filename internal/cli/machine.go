package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

// What programs need that run cocoon (specifications and errors as JSON), and options that people rarely use.

const maxSpec = 64 << 20 // bytes of a specification with the content of its volumes

// reportTo writes err to the descriptor that --error-fd names, for a program to read.
func (a *app) reportTo(err error) {
	if a.errorFD < 3 || err == nil {
		return
	}
	if _, ok := err.(textui.CommandExit); ok { //nolint:errorlint // exec returns it as it is; a wrapped one would be a failure
		return
	}
	f := os.NewFile(uintptr(a.errorFD), "error-fd")
	if f == nil {
		return
	}
	defer f.Close()
	if joined, ok := err.(interface{ Unwrap() []error }); ok { // only errors that each() joined, not a wrapped join
		err = joined.Unwrap()[0]
	}
	_ = json.NewEncoder(f).Encode(nodejson.Error{Class: errdefs.ClassOf(err).String(), Message: strings.TrimSpace(err.Error())})
}

// readJSON reads one value from a file, or from standard input for "-".
func (a *app) readJSON(path, what string, to any) error {
	in := a.Stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return errdefs.New(errdefs.InvalidArgument, "read %s: %w", what, err)
		}
		defer f.Close()
		in = f
	}
	dec := json.NewDecoder(io.LimitReader(in, maxSpec))
	dec.DisallowUnknownFields()
	if err := dec.Decode(to); err != nil {
		return errdefs.Invalidf("%s cannot be read as JSON: %w", what, err)
	}
	return nil
}

// runSpec launches the VM of a JSON specification. It fetches nothing.
func (a *app) runSpec(ctx context.Context, path string, f *specFlags, wait *waitFlags) error {
	var s nodejson.Spec
	if err := a.readJSON(path, "the specification", &s); err != nil {
		return err
	}
	return a.withClient(func(c *nodeclient.Client) error {
		r, err := c.Launch(ctx, s.Value())
		if err != nil {
			return err
		}
		a.noteStandIn(ctx, c, r)
		r, err = wait.settle(ctx, a, c, r)
		return a.printVM(r, f.out, err)
	})
}

func (a *app) vmVolumeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "volume REF VOLUME", Short: "Replace the files of a volume, in the running guest too", Args: cobra.ExactArgs(2),
		Long: `Replace the files of a volume, in the running guest too. Standard input is a JSON list of
{"path":"relative/name","data":"BASE64","mode":420}.` + refHelp,
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: func(cmd *cobra.Command, args []string) error {
			var files []vm.VolumeFile
			if err := a.readJSON("-", "the list of files", &files); err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error { return c.UpdateVolume(cmd.Context(), args[0], args[1], files) })
		},
	}
}

func (a *app) vmReleaseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "release REF CONTAINER", Short: "Let the containers start that wait for one that holds them", Args: cobra.ExactArgs(2),
		Long: `Let the containers start that wait for one whose specification says "hold". Whoever gave it says so, once the
container has started in the sense that they need.` + refHelp,
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			return c.ReleaseContainer(ctx, args[0], args[1])
		}),
	}
}

func (a *app) vmAddContainerCommand() *cobra.Command {
	return &cobra.Command{
		Use: "add-container REF", Short: "Start one more container in a running VM", Args: cobra.ExactArgs(1),
		Long: `Start one more container in a running VM. It runs once and ends with the guest at the latest. Its image must be on
the node. Standard input is the container in JSON:
{"name":"debug","kind":"ephemeral","image":"busybox:1.36","process":{"args":["sleep","60"]}}. With "manual":true it waits for
start-container.` + refHelp,
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: func(cmd *cobra.Command, args []string) error {
			var c vm.Container
			if err := a.readJSON("-", "the container", &c); err != nil {
				return err
			}
			return a.withClient(func(client *nodeclient.Client) error {
				_, err := client.AddContainer(cmd.Context(), args[0], c)
				return err
			})
		},
	}
}

func (a *app) vmStartContainerCommand() *cobra.Command {
	return &cobra.Command{
		Use: "start-container REF CONTAINER", Short: "Start a container that was added to a running VM", Args: cobra.ExactArgs(2),
		Long: `Start a container that was added to a running VM and waits for it. The command returns when the guest has started the
container.` + refHelp,
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			_, err := c.StartContainer(ctx, args[0], args[1])
			return err
		}),
	}
}

func (a *app) vmRemoveContainerCommand() *cobra.Command {
	return &cobra.Command{
		Use: "remove-container REF CONTAINER", Short: "Remove a container that was added to a VM", Args: cobra.ExactArgs(2),
		Long:              `Remove a container that was added to a VM, with its files and logs. A container that runs is killed.` + refHelp,
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			return c.RemoveContainer(ctx, args[0], args[1])
		}),
	}
}

func (a *app) vmResizeContainersCommand() *cobra.Command {
	return &cobra.Command{
		Use: "resize-containers REF", Short: "Change what containers of a running VM may use", Args: cobra.ExactArgs(1),
		Long: `Change what containers of a running VM may use, in the size that the VM has. Standard input is JSON, by container:
{"web":{"cpu_limit":500,"cpu_weight":20,"memory_limit":67108864}}, in thousandths of a CPU and bytes. What is left out has no
limit.` + refHelp,
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: func(cmd *cobra.Command, args []string) error {
			var want map[string]vm.Resources
			if err := a.readJSON("-", "the resources of the containers", &want); err != nil {
				return err
			}
			return a.withClient(func(client *nodeclient.Client) error {
				_, err := client.ResizeContainers(cmd.Context(), args[0], want)
				return err
			})
		},
	}
}

func (a *app) snapshotRemoteCommand() *cobra.Command {
	verb := func(use, short string, op func(ctx context.Context, c *nodeclient.Client, ref string, auth snapshot.Auth) error) *cobra.Command {
		var remote remoteFlags
		cmd := &cobra.Command{
			Use: use + " URL/REPO:TAG", Short: short, Long: short + "." + remoteHelp, Args: cobra.ExactArgs(1),
			RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
				auth, err := remote.auth(args[0], a.Getenv)
				if err != nil {
					return err
				}
				return op(ctx, c, args[0], auth)
			}),
		}
		remote.add(cmd)
		return cmd
	}
	return group("remote", "Look after snapshots in a registry", "  cocoon snapshot remote digest https://epoch.example.com:8443/warm:v1",
		verb("digest", "Print the digest of a snapshot in a registry, as JSON", func(ctx context.Context, c *nodeclient.Client, ref string, auth snapshot.Auth) error {
			digest, err := c.TagDigest(ctx, ref, auth)
			if err != nil {
				return err
			}
			return textui.PrintJSON(a.Stdout, nodejson.TagDigest{Digest: digest})
		}),
		verb("rm", "Remove the tag of a snapshot in a registry", func(ctx context.Context, c *nodeclient.Client, ref string, auth snapshot.Auth) error {
			return c.DeleteTag(ctx, ref, auth)
		}),
		verb("check", "Ask whether a registry answers and takes the credentials", func(ctx context.Context, c *nodeclient.Client, ref string, auth snapshot.Auth) error {
			return c.CheckRegistry(ctx, ref, auth)
		}))
}

// control turns lines from the descriptor of --control-fd into window sizes and signals for the command, until it
// ends.
func control(fd int, resize chan guest.WinSize, numbers chan<- int) {
	f := os.NewFile(uintptr(fd), "control-fd")
	if f == nil {
		return
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var m nodejson.Control
		if json.Unmarshal(lines.Bytes(), &m) != nil {
			continue
		}
		if m.Rows > 0 && m.Cols > 0 {
			latest(resize, guest.WinSize{Rows: m.Rows, Cols: m.Cols})
		}
		if m.Signal > 0 {
			select {
			case numbers <- m.Signal:
			default: // the command has eight waiting already
			}
		}
	}
}
