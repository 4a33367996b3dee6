package contract_test

import (
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/api/contract"
)

// The name of a VM shows its namespace and its pod, even if the namespace contains a dash.
func ExampleVMName() {
	fmt.Println(contract.VMName("prod", "eu-db"))
	fmt.Println(contract.VMName("prod-eu", "db"))
	// Output:
	// vk-prod-eu-db
	// vk--prod-eu.db
}

// The repository of a VM's snapshots is below its namespace.
func ExampleRepository() {
	fmt.Println(contract.Repository("prod", contract.VMName("prod", "db")))
	// Output: prod/vk-prod-db
}

// Parsing reports every bad annotation, not only the first.
func ExampleParseVMSpec() {
	_, err := contract.ParseVMSpec(map[string]string{
		contract.KeyMode:    "teleport",
		contract.KeyManaged: "perhaps",
	})
	if bad, ok := errors.AsType[contract.Errors](err); ok {
		for _, e := range bad {
			fmt.Println(e.Key)
		}
	}
	// Output:
	// cocoonset.cocoonstack.io/mode
	// cocoonset.cocoonstack.io/managed
}
