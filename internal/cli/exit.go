package cli

import "github.com/spf13/cobra"

// exitCodesText says what the codes of package textui mean. They are public API.
const exitCodesText = `cocoon ends with

    0  success
    1  internal error of cocoon or of the host
    2  invalid: a mistake in the command line, or a request that can never work
    3  the VM, image or snapshot does not exist
    4  the name is taken, or a concurrent change won
    5  not possible in the present state; the message says what must happen first
    6  cocoond or the guest cannot be reached; try again later
    7  something limited is used up: disk, memory, addresses
    8  this host, hypervisor or guest cannot do it
    9  stored data is damaged
  124  it took longer than the given time
  130  interrupted

except "cocoon vm exec", which ends with the exit code of the command in the guest (128+n for death by signal n)
when the command could be run at all.

Errors go to standard error as "Error: " and one sentence. Nothing else is printed then.`

func exitCodesTopic() *cobra.Command {
	return &cobra.Command{Use: "exit-codes", Short: "What the exit codes of cocoon mean", Long: exitCodesText}
}
